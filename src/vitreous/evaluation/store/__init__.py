"""What a run is, and the folder that holds its results."""
