"""The folder of a run: its configuration, lock, status and logs of workers, and the removal of the folder."""
