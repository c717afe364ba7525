"""What lies between ranks, and what sums over it take: arithmetic on links, nodes and buckets."""
