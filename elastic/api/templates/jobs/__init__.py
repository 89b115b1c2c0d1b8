"""Programs and a script as they are written into a job folder, and their job.yaml files."""
