"""Drawings and pages: figures as SVG and PNG, tables and sections as one HTML file."""
