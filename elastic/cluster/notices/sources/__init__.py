"""Where a node learns of its own preemption: one file per cloud (a new one goes here), which are
present, the threads that ask.

Nothing here imports Ray or needs credentials; each source is a Source (metadata_request.py).
"""
