// RowOps for processors with AVX2. Built with -mavx2; nothing here runs before row_ops() has asked the processor.
#if defined(__x86_64__)
#define CD_ROWS_TABLE kRowsAvx2
#include "rows_body.hpp"
#endif
