"""Layouts over GPUs of several kinds: batch shares and stages of unequal size, and who becomes
which rank."""
