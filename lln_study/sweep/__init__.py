"""Many runs of one file, side by side on a device, resumable."""
