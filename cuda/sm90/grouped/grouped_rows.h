// The grouped kernels that there are.
#pragma once

// Calls VISIT(rows) for each number of rows that a tile may have, in ascending order.
#define FUSED_MLP_GROUPED_ROWS(VISIT) VISIT(8) VISIT(16)
// The same where weights are transposed, which no other loop takes.
#define FUSED_MLP_TRANSPOSED_ROWS(VISIT) FUSED_MLP_GROUPED_ROWS(VISIT) VISIT(32)
