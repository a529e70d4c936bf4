#include "sim.h"

extern "C" {
thread_local const SimPlace *kvferry_sim_place = nullptr;

void kvferry_sim_set_place(const SimPlace *place) {
    kvferry_sim_place = place;
}
}
