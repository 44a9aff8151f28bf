"""What the gateway knows: prompts, generations, admission and the worker it serves. Neither HTTP nor gRPC."""
