"""Audit of a run from its event files: was every sample trained once, and only committed state restored?"""
