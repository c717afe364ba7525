"""How named tensors of all ranks meet: negotiated by name on rank 0, then moved in one order.

``messages`` is what ranks say to each other; ``negotiation`` decides, as pure data, which tensors
are ready and which requests do not fit together; ``wire`` carries the messages; ``background`` has
the threads; ``executor`` moves the tensors through the ``channels`` of a process set.
"""
