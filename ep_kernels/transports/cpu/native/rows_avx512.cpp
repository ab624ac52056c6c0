// RowOps for processors with AVX-512 F, BW, VL, DQ. Built with those flags; see rows_avx2.cpp.
#if defined(__x86_64__)
#define CD_ROWS_TABLE kRowsAvx512
#include "rows_body.hpp"
#endif
