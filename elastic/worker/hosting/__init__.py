"""What a driver has of sessions, wherever these run: orders, beats, added up; copies, silence."""
