"""Line plots, panels, heat maps and scatter plots as SVG and PNG, from plain values."""
