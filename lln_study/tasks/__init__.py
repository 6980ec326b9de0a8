"""What is trained: masked language modelling, GLUE, images, the Long Range Arena."""
