// The bits of a mask, lowest first: for (const int rank : Bits(mask)).
#pragma once
#include <cstdint>

namespace cd {

class Bits {
 public:
  explicit Bits(uint64_t mask) : mask_(mask) {}
  struct Place {
    uint64_t left;
    int operator*() const { return __builtin_ctzll(left); }
    void operator++() { left &= left - 1; }
    bool operator!=(Place other) const { return left != other.left; }
  };
  Place begin() const { return {mask_}; }
  Place end() const { return {0}; }

 private:
  uint64_t mask_;
};

}  // namespace cd
