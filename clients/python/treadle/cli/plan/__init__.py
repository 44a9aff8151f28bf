"""What an Engram model asks of memory and links, what this fabric gives, what fits where, and what it costs."""
