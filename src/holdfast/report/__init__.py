"""Pages about runs and results: HTML for a browser, Markdown for a terminal or a repository, CSV for a spreadsheet."""
