"""Text to convert, inspect and train on: files of a user, sentence pairs, a sample of our own."""
