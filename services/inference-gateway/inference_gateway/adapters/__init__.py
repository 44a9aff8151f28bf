"""One file for each outside thing: the worker, a model folder's tokenizer and chat template, Prometheus."""
