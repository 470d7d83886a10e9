"""Report pages about runs and experiments, as HTML, Markdown and CSV, with figures and timelines."""
