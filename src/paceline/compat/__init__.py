"""Other libraries' interfaces on Paceline, so that scripts written for them run here."""
