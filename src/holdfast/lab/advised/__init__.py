"""Parts of the experiment `advice-check`: what was predicted of failures beside what they then cost."""
