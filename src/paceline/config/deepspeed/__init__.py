"""Reading DeepSpeed's configs (``ds_config.json``): every key used, noted or refused by name."""
