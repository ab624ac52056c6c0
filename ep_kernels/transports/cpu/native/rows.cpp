// The baseline build of RowOps, and the choice among the builds.
#define CD_ROWS_TABLE kRowsBaseline
#include "rows_body.hpp"

#if defined(__x86_64__)
#include <cpuid.h>

namespace {

// What the processor has and the kernel saves on a context switch.
bool runs(unsigned leaf7_ebx, uint64_t saved_state) {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return false;
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & saved_state) != saved_state) return false;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & leaf7_ebx) == leaf7_ebx;
}

constexpr uint64_t kYmm = 0x6, kZmm = 0xe6;

}  // namespace
#endif

const cd::RowOps& cd::row_ops() {
#if defined(__x86_64__)
  if (runs(bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ, kZmm)) return kRowsAvx512;
  if (runs(bit_AVX2, kYmm)) return kRowsAvx2;
#endif
  return kRowsBaseline;
}
