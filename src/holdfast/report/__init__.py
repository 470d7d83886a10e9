"""Pages about runs and results, as HTML, Markdown and CSV, with figures and timelines."""
