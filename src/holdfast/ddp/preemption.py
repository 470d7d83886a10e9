"""Whether this worker was asked to stop in order. The signal only asks; the training loop answers at a boundary."""

import threading

PREEMPTED = 75
"""The exit status of a worker that was asked to stop, saved, and may go on later (EX_TEMPFAIL)."""

requested = threading.Event()
"""Set by SIGTERM in a worker; read at every step boundary."""
