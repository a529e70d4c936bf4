// One family of kernels: the unchanged .cu file, and the list of its kernels.
#include "sim.h"
#include KVFERRY_SIM_SOURCE

extern "C" const sim::Kernel *KVFERRY_SIM_LIST() {
    return sim::kernels;
}
