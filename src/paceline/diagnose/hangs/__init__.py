"""Finding hangs: a watch over each rank, and a diagnosis from the reports of all of them."""
