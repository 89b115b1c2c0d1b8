"""Processes that begin as forks of one that has torch imported: a new one stands in
milliseconds."""

from multiprocessing import get_context

FORKS = get_context("forkserver")
# a name that stands on no path of pytest's: Python 3.11 does not hand sys.path on to the server,
# and says nothing
FORKS.set_forkserver_preload(["elastic.worker.session.session"])
