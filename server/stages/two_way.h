// Two-way compression, in jobs that have an update codec: the mean of a round, encoded once more with the server's own
// residual, becomes the update frame that is written, applied and pulled.
#pragma once

#include "server/stages/stage.h"

namespace gradwire {

class TwoWay final : public Stage {
 public:
  explicit TwoWay(Stage* next) : next_(*next) {}
  void Pass(ClosedBucket&& closed) override;

 private:
  Stage& next_;
};

}  // namespace gradwire
