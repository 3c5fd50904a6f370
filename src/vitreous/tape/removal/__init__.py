"""Running a model without some of its patches, or with less attention on them."""
