"""What a run leaves behind: its directory, metrics, summary, samples, console lines and pictures."""
