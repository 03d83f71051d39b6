"""Between a model and its tokens: sampling, slots, 8-bit caches, timing."""
