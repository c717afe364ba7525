"""What the parity matrix is made of: layouts (rows), models (columns) and random pairs of both."""
