"""What a worker measures of itself and exports."""
