"""Parts of the experiment `backprop-tradeoff`: failures inside back-propagation, and what each strategy makes of them."""
