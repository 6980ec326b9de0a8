"""The convolution over tokens."""
