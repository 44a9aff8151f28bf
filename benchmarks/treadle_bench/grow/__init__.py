"""`treadle bench grow`: what a memory grown from text gains, on texts held out, beside controls and rivals.

`domains` (texts and their splits) · `ngram`, `lora` (rivals) · `runs`, `one_run`, `driver` (what is run, and running it) ·
`store`, `intervals`, `figures`, `goals`, `missing`, `tables` (from what was kept to what is printed) · `shipped` (the memory that
comes with treadle, alone) · `shipped_texts` (makes the texts that come with it).
"""
