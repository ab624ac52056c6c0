// A round between a kernel and the host's proxy, without a network: push a descriptor, wait for the word that answers.
// Not part of the product.
//
// Memory order: as in kernels/common/push.cuh; the fence in front of a push is part of what is measured.

struct Ping {
  World world;
  u64* word;    // pinned: rounds that the host has answered
  u64* fences_ns;  // [rounds] of the fence in front of the push
  u64* rounds_ns;  // [rounds] from there until the word is seen
  u64* reads_ns;   // [rounds] of one load of the word
  u8* payload;  // pinned: what a fence has to wait for
  u64 rounds;
};

extern "C" __global__ void __launch_bounds__(THREADS) ping(const __grid_constant__ Ping args) {
  if (threadIdx.x != 0) return;
  for (u64 i = 0; i < args.rounds; ++i) {
    ptx::store_pair(args.payload + i % 64 * 16, i, i);
    const u64 first = ptx::now_ns();
    ptx::fence_sys();
    const u64 begin = ptx::now_ns();
    net::push_word(args.world, 1, FLAG_PAYLOAD, i, OP_DISPATCH);
    while (ptx::load_acquire_sys(args.word) <= i && ptx::now_ns() - begin < args.world.timeout_ns) {
    }
    const u64 seen = ptx::now_ns();
    const u64 again = ptx::load_acquire_sys(args.word);
    args.fences_ns[i] = begin - first;
    args.rounds_ns[i] = seen - begin;
    args.reads_ns[i] = (again != 0 ? ptx::now_ns() : 0) - seen;
  }
}
