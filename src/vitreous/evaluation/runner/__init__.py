"""From a model, a data set and a protocol to the rows of numbers of a run."""
