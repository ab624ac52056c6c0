// Whether a declaration of ours is a library's.
#pragma once
#include <cstddef>

#define SAME_VALUE(a, b) static_assert(uint64_t(a) == uint64_t(b), #a)
#define SAME_SIZE(a, b) static_assert(sizeof(a) == sizeof(b), #a)
#define SAME_PLACE(a, m, b, n) static_assert(offsetof(a, m) == offsetof(b, n), #a "." #m)
