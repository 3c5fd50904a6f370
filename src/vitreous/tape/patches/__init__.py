"""Where the patches are: their grid, their places in the picture, the tokens that the head reads."""
