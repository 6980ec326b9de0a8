"""What the tasks train on: files of the user as tensors, batches as pure functions of the step."""
