"""What a run leaves to be read: its report as text, data, pictures and one HTML page."""
