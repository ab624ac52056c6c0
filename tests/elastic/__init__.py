"""Groups that grow and shrink while they are asked and their workers are killed."""
