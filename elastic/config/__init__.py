"""What a person writes, validated: job.yaml, drills, hardware files, scripts."""
