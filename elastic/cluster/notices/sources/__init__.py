"""What a node can learn about its own end: one file per cloud, which of them is here, and a watch that reads them in threads.

Nothing here imports Ray or needs credentials; each source is a Source (metadata_request.py).
"""
