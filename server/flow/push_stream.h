// What one push stream remembers between its chunks.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "server/desk/outbox.h"
#include "server/rounds/membership.h"

namespace gradwire {

// Used by one thread at a time (sinks are serial).
struct PushStream {
  uint64_t number = ++numbers;  // from 1; a member's later stream has a larger one
  MemberId member = 0;
  uint64_t incarnation = 0;
  std::string worker;
  std::shared_ptr<Outbox> out;  // for acknowledgements that wait for the journal
  // Frames whose remaining chunks are not merged. At most one per bucket.
  struct Skipped {
    uint64_t round = 0;
    bool answered = false;      // false: waits for the last chunk, which may ask for more
    uint32_t digest = 0;        // of the chunks so far: tells a repeat from another frame
    bool not_included = false;  // the frame came too late, and is no repeat
  };
  std::map<uint32_t, Skipped> skipped;

 private:
  inline static std::atomic<uint64_t> numbers = 0;
};

}  // namespace gradwire
