"""What configs take from DeepSpeed: its learning-rate schedules and Lion."""
