// Latency records as the device writes them become those of ep_kernels/telemetry.py: see
// transports/nvlink/memory/samples.py.
#include <cstdint>
#include <cstring>

#define CD_API extern "C" __attribute__((visibility("default")))

namespace {

// The device's words of a record (kernels/common/trace.cuh); one word for each rank follows.
struct DeviceRecord {
  int64_t op, mode, seq, tokens, start_ns, send_ns, received_ns, end_ns, parts;
};

// The host's; waits of `ranks` ranks follow.
struct Record {
  int32_t op, mode, tokens, ranks;
  int64_t seq, start_ns, send_ns, total_ns;
};

const DeviceRecord* at(const int64_t* words, int32_t number, int32_t ranks) {
  return reinterpret_cast<const DeviceRecord*>(words + number * (sizeof(DeviceRecord) / 8 + ranks));
}

int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// A block that sends may end after the last one that receives.
int64_t total_ns(const DeviceRecord& r) {
  return r.received_ns ? r.send_ns + r.end_ns - r.received_ns : larger(r.send_ns, r.end_ns - r.start_ns);
}

}  // namespace

// whole[i]: all parts of record i have ended. Returns how many have.
CD_API int32_t cd_samples_whole(const int64_t* words, int32_t count, int32_t ranks, int64_t complete, uint8_t* whole) {
  int32_t found = 0;
  for (int32_t i = 0; i < count; ++i) found += whole[i] = at(words, i, ranks)->parts == complete;
  return found;
}

// The whole ones, one behind the other.
CD_API void cd_samples(const int64_t* words, const uint8_t* whole, int32_t count, int32_t ranks,
                       int64_t clock_offset_ns, unsigned char* out) {
  for (int32_t i = 0; i < count; ++i) {
    if (!whole[i]) continue;
    const DeviceRecord* r = at(words, i, ranks);
    Record record = {int32_t(r->op), r->mode != 0, int32_t(r->tokens), ranks, r->seq, r->start_ns, r->send_ns, 0};
    record.start_ns += clock_offset_ns;
    record.total_ns = total_ns(*r);
    memcpy(out, &record, sizeof(record));
    memcpy(out + sizeof(record), r + 1, ranks * sizeof(int64_t));
    out += sizeof(record) + ranks * sizeof(int64_t);
  }
}
