"""One file per way of spreading a model; ``compose.py`` orders them."""
