// The existing grouped kernels.
#pragma once

// Calls VISIT(rows) for each number of rows that a tile may have, in ascending order.
#define FUSED_MLP_GROUPED_ROWS(VISIT) VISIT(8) VISIT(16)
// The same for transposed weights, which no other loop supports.
#define FUSED_MLP_TRANSPOSED_ROWS(VISIT) FUSED_MLP_GROUPED_ROWS(VISIT) VISIT(32)
